"""Reviews of finished trials and of tasks: critique, check, analyze, summarize. Each review is an ordinary job."""
