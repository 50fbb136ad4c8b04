"""The command `fratrie`: a module for each of its subcommands, and how they start and end."""
