"""Integrations with other libraries. Import each module only if you use its library."""
