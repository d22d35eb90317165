"""Steps before, during and after a task's tests that make the verdict trustworthy."""
