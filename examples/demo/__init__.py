"""The demonstration: one agent, real tools, real HTTP; run stock, then speculative, and compared."""
