"""Every algorithm as one writes it on a whiteboard: a file each, of one page.

A form imports torch and the standard library only, so the file is the copy. It is never
imported by the library, which has the same algorithm for any input, with checks.
"""
