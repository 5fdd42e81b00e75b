"""Files that others wrote, read as bytes and as data, and files that appear whole: no code in them
is run."""
