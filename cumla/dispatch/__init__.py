"""From a public function to a backend: arguments checked, the backend chosen, repeated calls remembered."""
