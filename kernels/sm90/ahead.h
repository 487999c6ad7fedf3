// What a block of stage 1 does before it may rely on what others have written: a rehearsal. It finds its first piece by a schedule,
// lengths and pages that may be out of date or in the midst of being written, and asks for what it will load first to come near.
// Afterwards it looks once more, at all of them at once: most often they are the same.

/// Where the piece ends that a part begins with; 0 if its first sequence has none. Whatever the part says, only lengths are read.
DEVICE int first_end(const DecodeParams& p, const Part& part) {
    if (part.seq < 0 || part.seq >= p.batch * num_groups(p) || part.seq > part.end_seq || part.token < 0) return 0;
    int end = extent(p, part.seq);
    if (part.seq == part.end_seq) end = smaller(end, part.end_token);
    return part.token < end ? end : 0;
}

/// Where a block begins.
struct Start {
    Part part;
    int end;  // of its first piece, 0 if that is not in the part's first sequence

    DEVICE Start(const DecodeParams& p, int item) : part(find_part(p, item)), end(first_end(p, part)) {}

    /// Whether all this is still so. What is looked at was found before, so that no look waits for another.
    DEVICE bool stands(const DecodeParams& p, int item) const {
        Part now = find_part(p, item);
        return first_end(p, part) == end && end > 0 && now.seq == part.seq && now.token == part.token &&
               now.end_seq == part.end_seq && now.end_token == part.end_token && now.split == part.split;
    }

    /// The first tile, once it is known whether it stands.
    DEVICE Cursor first_tile(const DecodeParams& p, int item, bool stands) {
        if (!stands) part = find_part(p, item);
        return Cursor(p, part, stands ? part.seq : -1, end);
    }
};
