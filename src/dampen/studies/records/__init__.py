"""What is on disk and what it says: a trial's folder, where it ran, the statistics over seeds, the table."""
