"""What clients store on this server: responses and conversations in memory."""
