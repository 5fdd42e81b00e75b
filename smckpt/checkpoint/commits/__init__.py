"""What makes files a checkpoint, and takes them away: leases, commits, sweeps, the newest."""
