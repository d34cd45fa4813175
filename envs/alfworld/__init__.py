"""ALFWorld: its games in the household engine, the same in TextWorld, and both compared."""
