"""The wire: the canonical turn, one module per dialect, translation and checks. Pure: nothing here does I/O."""
