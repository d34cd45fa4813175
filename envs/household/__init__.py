"""The built-in household: ALFWorld's text world as a native engine, with homes of its own and a small picture."""
