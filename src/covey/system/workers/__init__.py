"""Worker processes and threads with deadlines."""
