"""Items of the kinds of media as the front end sends them to an engine."""

from cpuserve.core.media import MediaItem
from cpuserve.program.pictures import KIND, PictureForm


def picture_item(digest, spans, tiles, payload=None, lines=()):
    """A picture with these tiles and lines (PictureForm)."""
    form = PictureForm(tuple(map(tuple, tiles)), tuple(lines))
    work, parts = form.num_patches, len(form.tiles)
    return MediaItem(KIND, digest, list(spans), work, parts, form.packed(), payload)
