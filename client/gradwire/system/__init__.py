"""The interpreter and the operating system: threads, timers, interrupts, randomness."""
