"""The metric families of ``/metrics``, read from the control plane at each scrape."""
