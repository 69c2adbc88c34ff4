# lme4, glmmTMB and flexmix on all splits of one table; called by glm_r.py.
#
#   Rscript glm_baselines.R FOLDER FAMILY SLOPES SPLITS LIMIT
#
# FOLDER has train0.csv, test0.csv, ... with the columns y, client and the features. SLOPES names the columns that vary within
# clients, separated by commas. A fit may take LIMIT seconds of processor time. Writes fits.csv, one row per fit, and the predictions of
# the chosen fits, METHODi.csv.
suppressPackageStartupMessages({
  library(lme4)
  library(glmmTMB)
  library(flexmix)
  library(parallel)
})

arguments <- commandArgs(trailingOnly = TRUE)
folder <- arguments[1]
family <- arguments[2]
slopes <- Filter(nzchar, strsplit(arguments[3], ",")[[1]])
splits <- as.integer(arguments[4])
limit <- as.numeric(arguments[5])
SLOW <- 20 # seconds
link <- switch(family, gaussian = gaussian(), bernoulli = binomial(), poisson = poisson())

processor_seconds <- function(pid) as.numeric(system2("ps", c("-o", "cputimes=", "-p", pid), stdout = TRUE))

# The result of a fit in a process of its own, which is stopped at the time limit. Warnings become notes.
with_limit <- function(fit) {
  job <- mcparallel({
    notes <- character()
    found <- tryCatch(
      withCallingHandlers(
        {
          start <- proc.time()
          result <- fit()
          result$seconds <- sum((proc.time() - start)[c("user.self", "sys.self")]) - result$after
          result
        },
        warning = function(w) {
          notes <<- c(notes, conditionMessage(w))
          invokeRestart("muffleWarning")
        }
      ),
      error = function(e) list(failed = conditionMessage(e), seconds = 0)
    )
    found$note <- paste(unique(c(found$failed, notes)), collapse = "; ")
    found
  })
  found <- NULL
  while (is.null(found) && processor_seconds(job$pid) < limit) found <- mccollect(job, wait = FALSE, timeout = 1)
  if (is.null(found)) {
    tools::pskill(job$pid, tools::SIGKILL)
    mccollect(job)
    return(list(failed = TRUE, note = sprintf("not done in %g s", limit), seconds = limit))
  }
  invisible(mccollect(job))
  found[[1]]
}

# Seconds that an expression takes, to subtract predictions from the time of a fit.
timed <- function(expression) {
  start <- proc.time()
  value <- expression
  list(value = value, seconds = sum((proc.time() - start)[c("user.self", "sys.self")]))
}

formula_of <- function(train, effects) {
  columns <- setdiff(names(train), c("y", "client"))
  random <- if (effects == "slopes") paste(c("1", slopes), collapse = " + ") else "1"
  as.formula(paste("y ~", paste(c("1", columns), collapse = " + "), "+ (", random, "| client)"))
}

deviations <- function(variances, residual) {
  sizes <- sqrt(diag(as.matrix(variances)))
  names(sizes) <- sub("\\(Intercept\\)", "intercept", names(sizes))
  shown <- c(head(sizes, 4), if (!is.na(residual)) c(residual = residual))
  more <- if (length(sizes) > 4) sprintf(", %d more", length(sizes) - 4) else ""
  paste0("sd ", paste(names(shown), signif(shown, 2), collapse = ", "), more)
}

fit_lme4 <- function(train, test, effects, ignored) {
  formula <- formula_of(train, effects)
  fit <- if (family == "gaussian") lmer(formula, train) else glmer(formula, train, family = link)
  after <- timed(list(
    mean = predict(fit, test, type = "response"),
    clients = deviations(VarCorr(fit)$client, if (family == "gaussian") sigma(fit) else NA)
  ))
  # a variance of 0 is an answer; other messages mean that the optimum was not found
  messages <- Filter(function(m) !grepl("singular", m), fit@optinfo$conv$lme4$messages)
  c(after$value, list(aic = AIC(fit), converged = length(messages) == 0, after = after$seconds))
}

fit_glmmTMB <- function(train, test, effects, distribution) {
  kind <- switch(distribution, nbinom2 = nbinom2(), link)
  fit <- glmmTMB(formula_of(train, effects), train, family = kind)
  after <- timed(list(
    mean = predict(fit, test, type = "response"),
    clients = deviations(VarCorr(fit)$cond$client, if (family == "gaussian") sigma(fit) else NA)
  ))
  converged <- fit$fit$convergence == 0 && isTRUE(fit$sdr$pdHess)
  c(after$value, list(aic = AIC(fit), converged = converged, after = after$seconds))
}

# Latent classes: the number of classes with the smallest BIC, and predictions weighted by each client's posterior.
fit_flexmix <- function(train, test, effects, ignored) {
  columns <- setdiff(names(train), c("y", "client"))
  target <- if (family == "bernoulli") "cbind(y, 1 - y)" else "y"
  formula <- as.formula(paste(target, "~", paste(columns, collapse = " + "), "| client"))
  driver <- FLXMRglm(family = link$family)
  set.seed(1)
  found <- suppressMessages(stepFlexmix(formula, data = train, model = driver, k = 1:4, nrep = 3, verbose = FALSE))
  fit <- if (is(found, "stepFlexmix")) getModel(found, "BIC") else found
  after <- timed({
    first <- !duplicated(train$client)
    weights <- matrix(posterior(fit)[first, ], sum(first), dimnames = list(train$client[first], NULL))
    each <- sapply(predict(fit, newdata = test), function(mean) mean[, 1])
    shares <- sort(colMeans(weights), decreasing = TRUE)
    list(
      mean = rowSums(each * weights[match(test$client, rownames(weights)), , drop = FALSE]),
      clients = paste("classes", paste(sprintf("%.0f %%", 100 * shares), collapse = ", "))
    )
  })
  c(after$value, list(aic = BIC(fit), converged = fit@converged, after = after$seconds))
}

# the first fit of a session compiles R code, which is not part of the time of one fit
invisible(lmer(Reaction ~ Days + (Days | Subject), sleepstudy))
invisible(glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), cbpp, family = binomial))
invisible(glmmTMB(Reaction ~ Days + (Days | Subject), sleepstudy))
invisible(flexmix(Reaction ~ Days | Subject, data = sleepstudy, k = 2))

candidates <- list(lme4 = list(), glmmTMB = list(), flexmix = list(list("classes", family)))
for (effects in c(if (length(slopes)) "slopes", "intercept")) {
  candidates$lme4 <- c(candidates$lme4, list(list(effects, family)))
  for (distribution in c(family, if (family == "poisson") "nbinom2")) {
    candidates$glmmTMB <- c(candidates$glmmTMB, list(list(effects, distribution)))
  }
}
fitters <- list(lme4 = fit_lme4, glmmTMB = fit_glmmTMB, flexmix = fit_flexmix)

fits <- list()
too_slow <- character() # what took long for nothing on one split is not tried on the next
for (split in seq_len(splits) - 1) {
  train <- read.csv(file.path(folder, sprintf("train%d.csv", split)))
  test <- read.csv(file.path(folder, sprintf("test%d.csv", split)))
  train$client <- as.character(train$client)
  test$client <- as.character(test$client)
  for (method in names(candidates)) {
    best <- NULL
    for (candidate in candidates[[method]]) {
      name <- if (candidate[[2]] == "nbinom2") paste(candidate[[1]], "nbinom2") else candidate[[1]]
      if (paste(method, name) %in% too_slow) next
      found <- with_limit(function() fitters[[method]](train, test, candidate[[1]], candidate[[2]]))
      usable <- is.null(found$failed) && isTRUE(found$converged) && all(is.finite(found$mean))
      if (!usable && found$seconds > SLOW) too_slow <- c(too_slow, paste(method, name))
      note <- if (usable) "" else if (is.null(found$failed)) "not converged" else substr(found$note, 1, 80)
      fits <- c(fits, list(data.frame(
        split = split, method = method, effects = name, seconds = found$seconds, chosen = FALSE, note = note,
        clients = if (is.null(found$clients)) "" else found$clients
      )))
      cat(sprintf("  split %d, %s, %s: %.2f s %s\n", split, method, name, found$seconds, note))
      if (usable && (is.null(best) || found$aic < best$aic)) best <- c(found, list(row = length(fits)))
    }
    if (!is.null(best)) {
      fits[[best$row]]$chosen <- TRUE
      writeLines(format(best$mean, digits = 15), file.path(folder, sprintf("%s%d.csv", method, split)))
    }
  }
}
write.csv(do.call(rbind, fits), file.path(folder, "fits.csv"), row.names = FALSE)
