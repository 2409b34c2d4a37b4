"""Several boxes: agents beside the daemons, placement of models, and one entrance, on Ray.

Only this package imports Ray, which the extra ``gpupool[fleet]`` installs.
"""
