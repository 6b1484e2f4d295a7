"""The console in a real browser, where there is one."""
