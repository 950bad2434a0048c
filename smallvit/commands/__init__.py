"""The commands: one file each, loaded when it is called. `main(chosen)` takes the parsed words and gives the exit status."""
