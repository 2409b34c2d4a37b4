"""Histograms and percentiles. Pure, standard library only."""
