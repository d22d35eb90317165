"""What is done before, while and after a task's tests decide, so that the verdict can be trusted."""
