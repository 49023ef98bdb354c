"""How models write down that they call a tool: one small class for each format, and the table of them."""
