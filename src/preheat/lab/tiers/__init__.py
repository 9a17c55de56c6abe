"""How fast each memory tier of this machine is: measured, not looked up."""
