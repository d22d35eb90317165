"""Web viewer for jobs and trials: pages rendered on the server, as a static export, or as JSON."""
