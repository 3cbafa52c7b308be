-- Whose KV: everything that must be equal for KV to be reusable.
create table namespaces (
    id integer primary key,
    digest blob not null unique check (length(digest) = 16),
    fields text not null check (json_valid(fields))
) strict;

-- Of which layers: a tree of snapshots continues only its own layers.
create table layouts (
    id integer primary key,
    namespace integer not null references namespaces (id),
    layers text not null,
    unique (namespace, layers)
) strict;

-- One immutable file each: the KV of tokens [start_token, end_token). Without tokens
-- it is a checkpoint: the state, and what else is needed, to go on from that place.
create table snapshots (
    id integer primary key autoincrement,
    name text not null unique check (length(name) = 32),
    layout integer not null references layouts (id),
    parent integer references snapshots (id),
    start_token integer not null check (start_token >= 0),
    end_token integer not null check (end_token >= start_token),
    first_token integer,
    tokens blob not null,
    extent text not null check (json_valid(extent)),
    end_digest blob not null check (length(end_digest) = 16),
    nbytes integer not null check (nbytes > 0),
    checksums blob not null check (length(checksums) % 16 = 0),
    kind text not null check (kind in ('system', 'user', 'assistant')),
    label text,
    pinned integer not null default 0 check (pinned in (0, 1)),
    created_ns integer not null,
    used_ns integer not null,
    expires_ns integer,
    hits integer not null default 0,
    check ((parent is null) = (start_token = 0)),
    check ((first_token is null) = (start_token = end_token))
) strict;

create unique index snapshots_by_end
on snapshots (layout, end_digest, start_token = end_token);
create index snapshots_by_branch on snapshots (layout, parent, start_token, first_token);
create index snapshots_by_parent on snapshots (parent);
create index snapshots_by_use on snapshots (used_ns);
create index snapshots_by_expiry on snapshots (expires_ns)
where expires_ns is not null;
create unique index snapshots_by_label on snapshots (label, layout)
where label is not null;

create trigger snapshots_are_immutable before update of
    name, layout, parent, start_token, end_token, first_token, tokens, extent,
    end_digest, nbytes, checksums, created_ns
on snapshots begin
    select raise(abort, 'a snapshot is immutable');
end;

-- The digest of each prefix that ends at a block boundary, and who holds it.
create table prefixes (
    digest blob primary key check (length(digest) = 16),
    position integer not null check (position > 0),
    snapshot integer not null references snapshots (id) on delete cascade
) strict, without rowid;

create index prefixes_by_snapshot on prefixes (snapshot);
