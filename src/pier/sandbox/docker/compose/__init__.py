"""Tasks of several services, as containers on private networks of pier's own."""
