"""The subcommands of `yolomlir`, one a file."""
