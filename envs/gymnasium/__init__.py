"""Any text environment of Gymnasium."""
