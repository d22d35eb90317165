"""One trial, from start to sealed result, as a sequence of named phases."""
