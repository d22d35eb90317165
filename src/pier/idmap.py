"""Which user and group ids a sandbox of this user can have."""
