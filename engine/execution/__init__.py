"""Forward passes: batch, attention, memory, and a folder per kind of device."""
