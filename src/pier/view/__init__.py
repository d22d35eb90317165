"""A web viewer of jobs and trials: pages rendered on the server, a static export of them, and the same as JSON."""
