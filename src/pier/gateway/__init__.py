"""The gateway: every model call of every agent, intercepted, recorded, budgeted and replayable."""
