"""Jobs: a plan of trials with stable identities, run with limits, resumable."""
