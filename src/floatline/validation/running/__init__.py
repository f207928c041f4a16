"""Jobs in processes of their own, on this machine."""
