"""Live workspaces: a directory of the user's with a sandbox around it that outlives the command that started it."""
