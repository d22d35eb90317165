"""What all sandboxes on a Linux kernel have alike, whoever made their namespaces: the process that serves them from
inside or beside them, the processes it is forked from, and pier's end of the connection."""
