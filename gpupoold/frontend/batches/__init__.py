"""OpenAI's files and batches: kept on disk, run in time that interactive requests leave."""
