"""MSL to C++: the translator, the host version of the Metal standard library, and the compile driver."""
