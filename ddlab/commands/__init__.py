"""The subcommands of ``ddlab``, a module each."""
