"""Reviews of finished trials and of tasks: critique, check, analyze, summarize. Each is an ordinary job."""
