"""What any server needs that is spoken to over HTTP: its endpoint, the requests that it has, the engine in front."""
