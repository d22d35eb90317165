"""Live workspaces: a user's directory with a sandbox around it that outlives the command that started it."""
