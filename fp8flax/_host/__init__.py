"""What a process meets: versions, interrupts, files."""
