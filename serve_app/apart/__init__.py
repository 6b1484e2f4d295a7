"""Work apart: what strangers wrote, in a process that forks for each piece of it, so that the kernel may end any."""
