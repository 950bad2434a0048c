"""The commands of the command line, one file each. `main(options)` gets the parsed options and returns the exit status."""
