"""What an agent is and why it ends: its graph, its rules, its proof. No asyncio and no engine is known here."""
