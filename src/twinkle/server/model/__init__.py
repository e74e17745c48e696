"""Names under which client scripts of newer releases import what :mod:`twinkle.server.common` has."""
