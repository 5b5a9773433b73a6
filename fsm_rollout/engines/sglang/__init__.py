"""SGLang, the production engine."""
