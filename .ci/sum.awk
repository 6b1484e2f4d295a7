# Adds up pytest's summary lines: `3 failed, 40 passed, 1 skipped in 12.34s (0:00:12)`.
/(^|[= ])[0-9]+ (passed|failed|errors?)(,.*)? in [0-9.]+s/ {
  gsub(/[=,]/, " ")
  for (field = 1; field < NF; field++) {
    word = $(field + 1)
    if ($field == "in") seconds += word
    else if ($field ~ /^[0-9]+$/ && word != "deselected") {
      sub(/s$/, "", word)
      if (!(word in count)) order[++num_words] = word
      count[word] += $field
    }
  }
}
END {
  for (rank = 1; rank <= num_words; rank++) printf "%s%d %s", (rank > 1 ? ", " : ""), count[order[rank]], order[rank]
  if (num_words) printf " in %.2fs\n", seconds
}
