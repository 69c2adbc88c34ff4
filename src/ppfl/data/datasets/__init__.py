"""Data sets by name: functions that read files, or draw samples, and return a `Pool` or a `Federation`."""
