"""Who may use how much: keys, quotas, and requests that are sent twice."""
