"""Tasks: directories in Harbor's format, where they come from, and what is wrong with them."""
